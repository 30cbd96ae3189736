"""Between options and a run: what command and function do alike. It knows neither."""
