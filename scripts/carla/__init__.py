"""The driving demo: two vehicles, towns in different orders, objects first and then boxes, and a page at the end."""
