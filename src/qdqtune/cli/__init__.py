"""Arguments in, tables out; the only place that prints."""
