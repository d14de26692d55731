"""Loggers to services: TensorBoard, Weights & Biases, MLflow, Prometheus, Slack."""
