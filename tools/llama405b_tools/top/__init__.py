"""cluster-top: frames in, a picture, lines on a screen."""
