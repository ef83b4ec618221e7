"""Recorded driving: towns, boxes, crops around objects, and the stream that visits them."""
