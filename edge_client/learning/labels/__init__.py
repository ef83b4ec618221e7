"""What a picture shows, as far as somebody knows: annotations, a teacher model, an operator."""
