"""Models as single-device code: built on meta by `build`, filled by `initialize`."""

from meshwright.models.decoder import Decoder
from meshwright.models.encoder import Encoder
from meshwright.models.generate import generate
from meshwright.models.heads import LossParts
from meshwright.models.initialize import fill, initialize
from meshwright.models.registry import architectures, build, register_model

__all__ = ["Decoder", "Encoder", "LossParts", "architectures", "build", "fill", "generate", "initialize", "register_model"]
