"""Services that show a run's metrics: wandb, mlflow."""
