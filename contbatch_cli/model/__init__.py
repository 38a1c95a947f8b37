"""The model side: torch and transformers start here."""
