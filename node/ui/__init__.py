"""Status for people and programs: text, full-screen view, dashboard, Prometheus."""
