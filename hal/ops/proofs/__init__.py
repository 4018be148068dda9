"""What proves an op: its truth in float64, its inputs, the bounds it is judged by."""
