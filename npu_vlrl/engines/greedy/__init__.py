"""An engine that takes the likeliest token, whatever it is asked."""
