"""Other tools' settings as ours, with what was found on the way. No torch."""
