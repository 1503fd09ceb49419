"""Rules for optimizers, schedules of rates and loss scaling."""
