"""What each power of the engine gains: one row after the other, its variants against each other, through Modelyard."""
