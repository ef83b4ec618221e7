"""Images as public data sets store them, read strictly."""
