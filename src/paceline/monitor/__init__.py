"""A run's files followed while they are written: live figures, alarms, a panel, an OpenMetrics endpoint. Torch-free."""
