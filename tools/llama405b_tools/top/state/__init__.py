"""What the hosts say, folded into a picture, with judgements. Pure."""
