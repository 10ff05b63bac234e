"""Reports of run directories: one HTML file that opens offline. Never imports torch."""
