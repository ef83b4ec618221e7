"""What every page that we serve shares: who may ask, for which host, what a browser may load, and the server itself."""
