"""What a training run takes, before it runs. Pure arithmetic on shapes; standard library and msgspec alone."""
