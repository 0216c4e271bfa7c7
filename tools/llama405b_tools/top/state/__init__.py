"""What the hosts report, folded into a picture, with judgments. Pure."""
