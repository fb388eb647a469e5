"""What quantization does to the outputs: measured, simulated, and made small by choosing ranges and biases."""
