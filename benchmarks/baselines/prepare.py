"""Before anybody's turn, in a process of its own: the inputs, torch's answer, and the model as an ONNX file."""

from __future__ import annotations

import logging
import warnings

from .job import Job, arrays_of, save_arrays, torch_model


def prepare(job: Job, with_onnx: bool) -> None:
    import torch

    from tilewright import zoo

    example = zoo.example_inputs(job.model, batch=job.batch, small=job.small)
    save_arrays(job.inputs_file, arrays_of(example))
    model, inputs = torch_model(job)
    with torch.inference_mode():
        save_arrays(job.reference_file, arrays_of(model(*inputs)))
    if with_onnx:
        try:
            _export(model, inputs, job)
        except (
            Exception
        ) as error:  # an exporter may raise anything; those who need the file will say why it is missing
            job.onnx_error_file.write_text(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")


def _export(model: object, inputs: tuple[object, ...], job: Job) -> None:
    import torch

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, inputs, str(job.onnx_file), dynamo=True, verbose=False)
