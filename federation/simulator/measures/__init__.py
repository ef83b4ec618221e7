"""What a simulation is judged by: accuracy, mean average precision, image distances, bytes, costs."""
