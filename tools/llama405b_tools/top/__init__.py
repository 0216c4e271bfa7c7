"""cluster-top: turns frames from hosts into a view, and the view into lines on a screen."""
