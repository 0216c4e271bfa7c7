"""Upload a model's directory to the Hugging Face Hub."""

from pathlib import Path

from huggingface_hub import HfApi

from llama405b.contract.errors import UserError
from llama405b.data.hub import said_clearly


def create(repo: str) -> None:
    """Create a repository, private, if it does not exist: so that access is known before hours of work.

    Raises:
        UserError: The name is not one, or access is denied.
        RunError: The network or the Hub failed.
    """
    if repo.count("/") != 1:
        raise UserError(f"--push-to-hub: {repo!r} is not a model name; write owner/name")
    with said_clearly(repo, Path()):
        HfApi().create_repo(repo, private=True, exist_ok=True)


def upload(directory: Path, repo: str) -> None:
    """Upload what does not begin with a dot; what is there already is not sent again.

    Raises:
        UserError: Access is denied.
        RunError: The network or the Hub failed; the same command resumes.
    """
    print(f"uploading {directory} to {repo}", flush=True)
    with said_clearly(repo, directory):
        HfApi().upload_folder(
            repo_id=repo, folder_path=directory, ignore_patterns=[".*"], commit_message="Export by llama405b"
        )
    print(f"uploaded to {repo}", flush=True)
