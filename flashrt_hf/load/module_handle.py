"""A loaded model that is called once for an answer."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

import torch

from .handle import Handle


class ModuleHandle(Handle):
    """An encoder, a vision model, any module."""

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's ``forward`` without grad; equal shapes replay one captured graph.

        Tensors are brought to the model's device. A model of transformers whose main input is not
        of integers (pixels, audio) gets that in its own dtype, and is asked for no cache where it
        would make one, which a graph could not return.

        Args:
            args, kwargs: of the model's ``forward``.

        Returns:
            What ``forward`` returns, on the model's device.

        Raises:
            TypeError: an argument that ``forward`` does not have, or one that it lacks, by name.
        """
        model, device = self.model, self.device
        signature = inspect.signature(model.forward)
        where = f"predict: {type(model).__name__}.forward"
        _check_names(where, signature, kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from None
        main, dtype = getattr(model, "main_input_name", None), getattr(model, "dtype", None)

        def placed(name: str, value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            cast = name == main and value.is_floating_point() and dtype is not None
            return value.to(device, dtype if cast else value.dtype)

        args = tuple(placed(n, a) for n, a in zip(signature.parameters, args, strict=False))
        kwargs = {n: placed(n, a) for n, a in kwargs.items()}
        asks = main is not None and "use_cache" in signature.parameters
        if asks and "use_cache" not in bound.arguments:
            kwargs["use_cache"] = False
        with self._running():
            return model(*args, **kwargs)


def _check_names(where: str, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    """Refuse names that ``forward`` would not read, also behind its ``**kwargs``.

    transformers declares what those may be; of another module any name may be meant.
    """
    known = {n for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            declared = typing.get_args(parameter.annotation)
            if not (declared and typing.is_typeddict(declared[0])):
                return
            fields: Any = declared[0]
            known |= {"return_dict"} | fields.__required_keys__ | fields.__optional_keys__
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(
            f"{where}: arguments must be of {', '.join(sorted(known))}, got "
            f"{', '.join(map(repr, unknown))}"
        )
