"""A procedural street with exact boxes: pictures for machines that have neither a camera nor a recording."""
