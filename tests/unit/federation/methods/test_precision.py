from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from replayfleet.federation.methods.steps import precision
from replayfleet.federation.methods.steps.precision import computing_in, rounding_to_bfloat16
from replayfleet.models.build import initialise

BFLOAT16 = 2**-8
"""What a number loses at most, in parts of itself, when bfloat16 keeps it."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, stride=2)
        self.bare = nn.Conv2d(8, 8, 3, groups=2, bias=False)
        self.normal = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.normal(self.bare(self.convolution(images))))
        return self.head(features.mean(dim=(2, 3)))


@pytest.fixture
def net() -> Net:
    return initialise(Net(), torch.Generator().manual_seed(0)).train()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(16, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def gradients(net: Net, images: torch.Tensor, context: object) -> dict[str, torch.Tensor]:
    net.zero_grad()
    with context:  # type: ignore[attr-defined]
        loss = F.cross_entropy(net(images), torch.arange(16) % 5)
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in net.named_parameters() if parameter.grad is not None}


def test_rounding_is_pytorchs_own_bfloat16_but_for_the_order_of_sums(net: Net, images: torch.Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = net.convolution(images), net.head(torch.ones(2, 8))
    with rounding_to_bfloat16("cpu", torch.float32):
        found = net.convolution(images), net.head(torch.ones(2, 8))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2 * BFLOAT16, atol=BFLOAT16)


def test_its_gradients_are_those_of_autocast(net: Net, images: torch.Tensor) -> None:
    theirs = gradients(net, images, torch.autocast("cpu", dtype=torch.bfloat16))
    ours = gradients(net, images, rounding_to_bfloat16("cpu", torch.float32))
    assert ours.keys() == theirs.keys()
    assert {gradient.dtype for gradient in ours.values()} == {torch.float32}
    flat, expected = (torch.cat([one.flatten() for one in each.values()]) for each in (ours, theirs))
    assert (flat - expected).norm() < 0.1 * expected.norm()


def test_products_are_of_rounded_numbers() -> None:
    fine = torch.tensor([[1 + 2**-12]])  # 1 in bfloat16
    with rounding_to_bfloat16("cpu", torch.float32):
        assert F.linear(fine, torch.tensor([[256.0]])).item() == 256
        assert F.linear(input=fine, weight=torch.tensor([[256.0]]), bias=torch.tensor([fine.item()])).item() == 256


@pytest.mark.parametrize(
    "multiplied",
    [
        lambda one: one @ one,
        lambda one: one.matmul(one),
        lambda one: torch.matmul(one, other=one),
        lambda one: torch.bmm(one[None], one[None])[0],
        lambda one: F.conv_transpose2d(one[None, None], one[None, None])[0, 0],
    ],
)
def test_packages_models_may_multiply_in_other_ways(multiplied: Callable[[torch.Tensor], torch.Tensor]) -> None:
    one = torch.tensor([[1 + 2**-12]])
    with rounding_to_bfloat16("cpu", torch.float32):
        found = multiplied(one)
    assert found.dtype == torch.bfloat16
    assert found.item() == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64])
def test_what_autocast_leaves_as_it_is_is_left(dtype: torch.dtype) -> None:
    one = torch.tensor([[257]]).to(dtype)
    with rounding_to_bfloat16("cpu", torch.float32):
        assert torch.equal(one @ one, (257 * 257 * torch.ones(1, 1)).to(dtype))


def test_what_is_written_elsewhere_arrives_there() -> None:
    one, out = torch.tensor([[2.0]]), torch.zeros(1, 1)
    with rounding_to_bfloat16("cpu", torch.float32), torch.no_grad():
        torch.matmul(one, one, out=out)
    assert out.item() == 4


def test_sums_are_of_float32() -> None:
    many = torch.ones(1, 4096)  # one after the other, a sum in bfloat16 ends at 256
    with rounding_to_bfloat16("cpu", torch.float32):
        assert F.linear(many, many).item() == 4096


def test_what_is_no_product_stays_as_it_is(images: torch.Tensor) -> None:
    with rounding_to_bfloat16("cpu", torch.float32):
        assert F.relu(images).dtype == torch.float32


@pytest.mark.parametrize("there", [False, True])
def test_a_processor_without_bfloat16_rounds(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_multiplies_bfloat16", lambda: there)
    fine = torch.tensor([[1 + 2**-12]])
    with computing_in("bfloat16", torch.device("cpu")):
        assert F.linear(fine, fine).item() == 1
    with computing_in("float32", torch.device("cpu")):
        assert F.linear(fine, fine).item() > 1


@pytest.mark.parametrize("there", [False, True])
def test_models_that_run_as_one_are_rounded_too(
    there: bool, net: Net, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_multiplies_bfloat16", lambda: there)
    layer = net.convolution

    def answer(one: dict[str, torch.Tensor]) -> torch.Tensor:
        with computing_in("bfloat16", images.device, vmapped=True):
            found = torch.func.functional_call(layer, one, (images,))
        assert found.dtype == torch.bfloat16
        return found

    together = torch.func.vmap(answer)(
        {name: torch.stack([value, value * 2]) for name, value in layer.named_parameters()}
    )
    with computing_in("bfloat16", images.device):
        alone = layer(images)
    torch.testing.assert_close(together[0], alone, rtol=4 * BFLOAT16, atol=4 * BFLOAT16)
