"""Reports: a timeline and its figures as text, pictures, an HTML page or a trace."""
