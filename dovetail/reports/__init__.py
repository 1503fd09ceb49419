"""Reports that people read: tables and curves of training runs."""
