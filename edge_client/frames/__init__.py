"""From a picture to answers: the serving loop, and how a task looks at pictures."""
