"""What the pipeline does: one room per stage; nothing here knows Prefect, DVC or processes."""
