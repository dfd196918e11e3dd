"""What is measured: sizes, inputs, expected results and the least work of each case."""
