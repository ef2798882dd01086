"""When and where stages run: Prefect, DVC and processes; no mathematics lives here."""
