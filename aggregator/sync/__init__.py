"""What clients send and get: presence, admission, uploads, downloads."""
