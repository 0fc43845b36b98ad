"""Reports: figures of a timeline as text, pictures, pages and traces."""
