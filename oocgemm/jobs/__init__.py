"""Jobs: from what a call asks for to a finished C."""
