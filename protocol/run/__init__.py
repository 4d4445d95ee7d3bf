"""What a run is: its signed manifest with all settings, the model that it names, and who may be a member."""
