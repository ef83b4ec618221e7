"""How a picture becomes what the served model is asked, and what it says becomes an answer."""
