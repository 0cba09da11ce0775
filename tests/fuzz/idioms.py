"""What models are made of beyond single functions: scans, routing, memories, spectra, masks. A table of productions.

A production is a few lines. `{0}` is a value that there is, `{1}` what the first line gives, and so on; a line that begins
with `!` gives nothing; the last line gives the new value. In the sizes B, T, L are the value's own (rows, dim 1, last dim),
K is drawn. `$param(T, L)`, `$zeros(L)` (a buffer), `$linear(L, K)` and the other makers below are members of the module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from grammar import KINDS as FUNCTIONS
from grammar import Builder, operation
from torch import Tensor


@dataclass(frozen=True)
class Idiom:
    """Attributes:
    fits: the dims of the value; 0: any number of them.
    ids: whether dim 1 are the batch's tokens, so that token ids and labels go with it.
    """

    lines: tuple[str, ...]
    fits: int = 3
    ids: bool = False

    def takes(self, t: Tensor, ids: Tensor | None) -> bool:
        if t.dim() < 2 or (self.fits and t.dim() != self.fits):
            return False
        return not self.ids or (ids is not None and t.shape[:2] == ids.shape)


def _idiom(*lines: str, fits: int = 3, ids: bool = False) -> Idiom:
    return Idiom(lines, fits, ids)


LAYERS = {
    "kept": "torch.zeros(%s)",
    "pair": "[torch.zeros(%s) for _ in range(2)]",
    "linear": "nn.Linear(%s)",
    "wide": "nn.Linear(%s, bias=False)",
    "normed": "torch.nn.utils.parametrizations.weight_norm(nn.Linear(%s))",
    "norm": "nn.LayerNorm(%s)",
    "instance": "nn.InstanceNorm1d(%s, affine=True)",
    "grucell": "nn.GRUCell(%s)",
    "lstmcell": "nn.LSTMCell(%s)",
    "embedding": "nn.Embedding(%s)",
    "conv2d": "nn.Conv2d(%s)",
    "upconv": "nn.ConvTranspose1d(%s)",
    "conv1d": "nn.Conv1d(%s)",
    "prelu": "nn.PReLU(%s)",
    "dict": "nn.ParameterDict(dict(a=torch.randn(%s), b=torch.ones(1)))",
    "list": "nn.ParameterList([torch.randn(%s) for _ in range(2)])",
    "frozen": "nn.Linear(%s).requires_grad_(False)",
    "spectral": "torch.nn.utils.parametrizations.spectral_norm(nn.Linear(%s))",
    "linears": "nn.ModuleList(nn.Linear(%s) for _ in range(3))",
    "linears_by_name": "nn.ModuleDict({n: nn.Linear(%s) for n in ('left', 'right')})",
    "mlp": "nn.Sequential(nn.Linear(%s), nn.ReLU(inplace=True), nn.Dropout(0.0))",
}

IDIOMS: dict[str, tuple[Idiom, ...]] = {
    "scans": (
        _idiom("torch.zeros_like({0}[:, 0])", "[]", "!for t in {0}.unbind(1): {2}.append(({2}[-1] if {2} else {1}) * torch.sigmoid($param(L)) + t)",
               "torch.stack({2}, 1) * 0.5"),
        _idiom("{0} * 0.5", "{1} + F.pad({1}, (0, 0, 1, 0))[:, :-1] * $param(L)", "{2} + F.pad({2}, (0, 0, 2, 0))[:, :{2}.shape[1]] * $param(L).square() * 0.3"),
        _idiom("[{0}.new_zeros({0}.shape[0], K)]", "!for t in {0}.unbind(1): {1}.append($grucell(L, K)(t, {1}[-1]))", "torch.stack({1}[1:], 1)"),
        _idiom("[({0}.new_zeros({0}.shape[0], K),) * 2]", "!for t in {0}.unbind(1): {1}.append($lstmcell(L, K)(t, {1}[-1]))",
               "torch.stack([h for h, c in {1}[1:]], 1)"),
        _idiom("[{0}.new_zeros({0}.shape[0], L)]", "!for t, m in zip({0}.unbind(1), (ids > 3).unbind(1)): {1}.append(torch.where(m[:, None], torch.tanh($linear(L, L)({1}[-1]) + t), {1}[-1]))",
               "torch.stack({1}[1:], 1)", ids=True),
        _idiom("torch.empty_like({0})", "!for t in range({0}.shape[1]): {1}[:, t] = {0}[:, t] * $param(L) + (0.5 * {1}[:, t - 1].clone() if t else 0)", "{1} * 1.0"),
        _idiom("{0}.cumsum(1) / torch.arange(1, {0}.shape[1] + 1, dtype={0}.dtype)[:, None]", "torch.cat([{0}[:, :1], {1}[:, :-1]], 1).lerp({0}, torch.sigmoid($param(L)))"),
        _idiom("torch.einsum('btl,ts->bsl', {0}, torch.exp(-torch.cdist(*[torch.arange(float({0}.shape[1]), dtype={0}.dtype)[:, None]] * 2)).tril())"),
    ),
    "routed": (
        _idiom("$wide(L, 3)({0}).softmax(-1)", "{1}.topk(2, -1)", "{0}.new_zeros({1}.shape).scatter(-1, {2}.indices, {2}.values)",
               "sum({3}[..., e, None] * f({0}) for e, f in enumerate($linears(L, L)))"),
        _idiom("$linear(L, 1)({0}).squeeze(-1)", "{1}.topk(2, 1).indices[..., None].expand(-1, -1, L)", "{0}.gather(1, {2})",
               "{0}.scatter_add(1, {2}, $linear(L, L)({3}) * {1}.sigmoid().gather(1, {2}[..., 0])[..., None])"),
        _idiom("F.one_hot($linear(L, 3)({0}).argmax(-1), 3).to({0}.dtype)", "torch.einsum('btl,bte,elk->btk', {0}, {1}, $param(3, L, K) * 0.4)"),
        _idiom("$linear(L, 4)({0})", "({1} - {1}.logsumexp(-1, keepdim=True)).exp() @ $param(4, K)", fits=0),
        _idiom("{0}.view({0}.shape[0], -1, 1, L) * $param(2, L)", "torch.zeros_like({1}[..., 0])",
               "!for _ in range(2): {2} = {2} + ({1}.detach() * ({2}.softmax(1)[..., None] * {1}).sum(1, keepdim=True).tanh().detach()).sum(-1)",
               "({2}.softmax(1)[..., None] * {1}).sum(1)"),
        _idiom("$param(3, L).expand({0}.shape[0], -1, -1)", "({1} @ {0}.mT / L ** 0.5).softmax(1) + 1e-3", "({2} / {2}.sum(-1, keepdim=True)) @ $linear(L, L)({0})",
               "$grucell(L, L)({3}.flatten(0, 1), {1}.flatten(0, 1)).view_as({3})"),
        _idiom("$embedding(11, L)(ids % 3)", "{0} * {1}.sigmoid() + (ids % 2 == 0)[..., None] * $linears_by_name(L, L)['left']({0}) + torch.where((ids % 2 == 1)[..., None], $linears_by_name(L, L)['right']({0}), 0)", ids=True),
    ),
    "graphs": (
        _idiom("ids[..., None].expand(-1, -1, L)", "{0}.new_zeros({0}.shape[0], 11, L).scatter_add(1, {1}, {0})", "{2}.gather(1, {1}) * $param(L)", ids=True),
        _idiom("{0}.new_zeros(11, L).index_add(0, ids.flatten(), {0}.flatten(0, 1)) * 0 + 1", "{0} * {1}[ids] * $param(L)", ids=True),
        _idiom("{0}.new_zeros({0}.shape[0], 11, L).scatter_reduce(1, ids[..., None].expand(-1, -1, L), {0}, 'amax', include_self=False)", ids=True),
        _idiom("(ids[:, :, None] - ids[:, None, :]).abs() < 4", "{1} / {1}.sum(-1, keepdim=True).to({0}.dtype)", "torch.baddbmm($linear(L, L)({0}), {2}, {0}, beta=0.5)", ids=True),
        _idiom("{0}.gather(1, (ids % {0}.shape[1])[..., None].expand_as({0}))", "torch.addcmul({0}, {1}, $param(L), value=0.3)", ids=True),
        _idiom("{0}[torch.arange({0}.shape[0])[:, None], ids % {0}.shape[1]]", "{1} - $param(T, L)", ids=True),
        _idiom("{0}[:, [0, 1], None] - {0}[:, None, [1, 0]]", "{1}.square().sum(-1).add(1).rsqrt()", "{2} @ $linear(L, K)({0}[:, :2])"),
    ),
    "spectra": (
        _idiom("torch.fft.rfft({0}, dim=1)", "torch.fft.irfft({1} * torch.view_as_complex($param(T // 2 + 1, L, 2)), n={0}.shape[1], dim=1)"),
        _idiom("torch.fft.fft2({0}, dim=(1, 2)).real * 0.3"),
        _idiom("torch.arange({0}.shape[1], dtype={0}.dtype)[:, None] * 0.5 ** torch.arange(L // 2)", "{0}[..., : L // 2 * 2].chunk(2, -1)",
               "torch.cat([{2}[0] * {1}.cos() - {2}[1] * {1}.sin(), {2}[1] * {1}.cos() + {2}[0] * {1}.sin()], -1)"),
        _idiom("torch.polar(torch.ones({0}.shape[1], L // 2, dtype={0}.dtype), torch.outer(torch.arange({0}.shape[1], dtype={0}.dtype), torch.ones(L // 2, dtype={0}.dtype)))",
               "torch.view_as_complex({0}[..., : L // 2 * 2].unflatten(-1, (-1, 2)).contiguous())", "torch.view_as_real({2} * {1}).flatten(-2)"),
    ),
    "windows": (
        _idiom("F.pad({0}, (0, 0, 2, 0)).unfold(1, 3, 1)", "({1} * $param(3)).sum(-1)"),
        _idiom("torch.cat([$param(1, L).expand({0}.shape[0], 1, -1), {0}], 1)", "$linear(L, L)({1})[:, 1:] + {1}[:, :1]"),
        _idiom("torch.cat([$mlp(L, L)(c) for c in {0}.split(2, 1)], 1)"),
        _idiom("{0}.chunk(2, -1)", "{1}[0] + $linear(L - (L + 1) // 2, (L + 1) // 2)({1}[1])", "torch.cat([{2}, {1}[1] * F.linear({2}, $param(L - (L + 1) // 2, (L + 1) // 2)).sigmoid()], -1)"),
        _idiom("$conv1d(T, 4, 3, stride=2, padding=1)({0})", "{'low': {1}, 'high': {0}}", "$upconv(4, T, 4, stride=2, padding=1)({2}['low'])", "torch.cat([{3}, {2}['high']], -1)"),
        _idiom("$conv2d(1, 4, 3, padding=1)({0}.unsqueeze(1))", "F.group_norm({1}, 2, $param(4))", "$conv2d(4, 1, 3, padding=1)(F.relu({2}, inplace=True)).squeeze(1) + {0}"),
        _idiom("$instance(T)({0})"),
        _idiom("$prelu(T)({0})"),
    ),
    "masks": (
        _idiom("(ids != 0)[:, None, None, :] & torch.ones({0}.shape[1], {0}.shape[1], dtype=torch.bool).tril()", "$linear(L, 6)({0}).unflatten(-1, (2, 3)).transpose(1, 2)",
               "F.scaled_dot_product_attention({2}, {2}, {2}, attn_mask={1} | torch.eye({0}.shape[1], dtype=torch.bool))", "{3}.transpose(1, 2).flatten(2)", ids=True),
        _idiom("(ids > 2).to({0}.dtype)[..., None]", "({0} * {1}).sum(1) / {1}.sum(1).clamp(min=1)", ids=True),
        _idiom("(ids > 2).cumsum(1) - 1", "{0} + $embedding(T + 2, L)({1}.clamp(min=0)) * ({1} >= 0)[..., None]", ids=True),
        _idiom("torch.arange({0}.shape[1])", "$embedding(2 * T, 2)({1}[:, None] - {1}[None] + len({1})).permute(2, 0, 1)", "$linear(L, 4)({0}).unflatten(-1, (2, 2)).transpose(1, 2)",
               "F.scaled_dot_product_attention({3}, {3}, {3}, attn_mask={2}).transpose(1, 2).flatten(2)"),
        _idiom("torch.where((ids == ids[:, :1])[..., None], $param(L), {0})", ids=True),
        _idiom("{0}.masked_fill((ids < 2)[..., None], float('-inf')).amax(1).clamp(min=-3)", ids=True),
        _idiom("torch.bucketize({0}.detach(), torch.linspace(-1, 1, 4, dtype={0}.dtype))", "$embedding(5, 3)({1}).flatten(-2)"),
        _idiom("(-({0}.sort(-1).values[..., :, None] - {0}[..., None, :]).abs()).softmax(-1)", "({1} @ {0}[..., None]).squeeze(-1)"),
        _idiom("F.embedding(ids, $param(11, L), padding_idx=0)", "{0} * {1}", ids=True),
        _idiom("F.embedding_bag(ids, $param(11, L), mode='mean')", "{0} + {1}[:, None]", ids=True),
    ),
    "parts": (
        _idiom("$param(T + 3, L)[: {0}.shape[1]] + {0}"),
        _idiom("$param(2 * L + 2, L)", "F.linear({0}, {1}[:L]) * 0.3 + F.linear({0}, {1}[L : 2 * L]).sigmoid() * {1}[-1]", fits=0),
        _idiom("$list(L)", "{0} * {1}[0] + torch.stack(list({1})).mean(0)", fits=0),
        _idiom("$dict(L)", "{0} * {1}['a'].softmax(0) + {1}['b']", fits=0),
        _idiom("$normed(L, K)({0})", fits=0),
        _idiom("$linear(L, L)", "F.linear({0}, {1}.weight.T @ {1}.weight * 0.3, {1}.bias)", fits=0),
        _idiom("$linear(L, L * 3)({0}.mean(1)).unflatten(-1, (L, 3))", "torch.bmm({0}, {1}) * 0.5"),
        _idiom("$linear(L, 2 * L)({0}[:, 0]).chunk(2, -1)", "$norm(L)({0}) * (1 + {1}[0][:, None]) + {1}[1].unsqueeze(1)"),
        _idiom("torch.addmm($param(K), {0}.flatten(0, 1), $param(L, K)).unflatten(0, {0}.shape[:2]) * 0.3"),
        _idiom("torch.kron($param(2, 2), $param(L, K))", "torch.cat([{0}, {0}], -1) @ {1} * 0.2", fits=0),
        _idiom("$param(L, 2)", "{0} @ (({1} @ {1}.T) * 0.2 + torch.eye(L, dtype={0}.dtype))", fits=0),
        _idiom("$param(L, L)", "{0} @ torch.linalg.solve(torch.eye(L, dtype={0}.dtype) * 9 + {1} - {1}.T, torch.eye(L, dtype={0}.dtype) * 9)", fits=0),
        _idiom("torch.zeros_like({0})", "!with torch.no_grad(): torch.mul({0}, 0.5, out={1})", "{0} + {1}", fits=0),
        _idiom("{0} * 0.1", "!for _ in range(3): {1} = torch.tanh($linear(L, L)({1}) * 0.3 + {0}).detach()", "torch.tanh($linear(L, L)({1}) * 0.3 + {0})", fits=0),
    ),
    "coupled": (
        _idiom("F.normalize({0}.mean(1), dim=-1)", "({1} @ {1}.T / 0.5).softmax(-1)", "torch.einsum('bc,ctl->btl', {2}, {0})"),
        _idiom("{0}.flatten(0, 1)[torch.arange({0}.shape[0] * {0}.shape[1]).flip(0)].view_as({0}) * $param(L)"),
        _idiom("{0} + {0}[[-1, *range({0}.shape[0] - 1)]] * $param(L)", fits=0),
        _idiom("$linear(L, L)", "torch.autograd.grad({1}({0}).square().mean(), {1}.weight, create_graph=True)[0]", "F.linear({0}, {1}.weight - 0.1 * {2}, {1}.bias)", fits=0),
    ),
    "buffers": (
        _idiom("$zeros(3)", "!{1}[1:] = {1}[:-1].clone()", "!{1}[0] = {0}.detach().mean()", "{0} + {1}.sum()", fits=0),
        _idiom("$ones(5, L)", "torch.cdist({0}.detach().flatten(0, 1), {1} * torch.arange(5, dtype={0}.dtype)[:, None] * 0.3).argmin(-1).view({0}.shape[:2])",
               "{1}[{2}]", "!{1}.lerp_(torch.zeros_like({1}).index_add(0, {2}.flatten(), {0}.detach().flatten(0, 1)), 0.1)", "{0} + ({3} - {0}).detach() + $param(L)"),
        _idiom("$linear(L, L)", "$zeros(L, L)", "!{2}.mul_(0.9).add_({1}.weight.detach(), alpha=0.1)", "{1}({0}) - F.linear({0}, {2}).detach()", fits=0),
        _idiom("$zeros(2, L)", "!{1}[0].copy_({0}.detach().flatten(0, -2).amax(0))", "{0} * (1 + {1}.mean(0))", fits=0),
    ),
    "kept tensors": (
        _idiom("$kept(L)", "!{1}[:1].lerp_({0}.detach().mean((0, 1))[:1], 0.3)", "{0} * (1 + {1})"),
        _idiom("$kept(2, L)", "!{1}[0].copy_({0}.detach().mean((0, 1)))", "{0} + {1}.mean(0)"),
        _idiom("$kept(L)", "!{1}.view(-1).mul_(0.9).add_({0}.detach().amax((0, 1)), alpha=0.1)", "{0} + {1} * 0.1"),
        _idiom("$kept(3, L)", "!{1}.copy_(torch.cat([{1}[1:], {0}.detach().mean((0, 1))[None]]))", "{0} + {1}.sum(0) * 0.1"),
        _idiom("$kept(2, 3)", "!{1}.diagonal().add_({0}.detach().std())", "{0} * (1 + {1}.sum() * 0.1)", fits=0),
        _idiom("$pair(L)", "!torch._foreach_mul_({1}, 0.9)", "!{1}[1][:] = {0}.detach().mean((0, 1))", "{0} * (1 + {1}[0] + {1}[1])"),
        _idiom("$kept(L)", "!{1}[:2].add_(0.1)", "{0} + {1}", fits=0),
    ),
    "written parameters": (
        _idiom("$embedding(11, L, max_norm=0.7)(ids)", "{0} + {1}", ids=True),
        _idiom("$linear(L, K)", "!with torch.no_grad(): {1}.weight.div_({1}.weight.norm(dim=1, keepdim=True) + 0.1)", "{1}({0})", fits=0),
        _idiom("$linear(L, K)", "!{1}.weight.detach()[0].mul_(0.9)", "{1}({0})", fits=0),
        _idiom("$linear(L, K)", "!{1}.weight.data.T[:1].clamp_(-0.2, 0.2)", "{1}({0})", fits=0),
        _idiom("$linear(L, K)", "$frozen(L, K)", "!with torch.no_grad(): [q.lerp_(p, 0.1) for p, q in zip({1}.parameters(), {2}.parameters())]", "{1}({0}) - {2}({0})", fits=0),
        _idiom("$linear(L, K)", "$frozen(L, K)", "{1}({0}) * {2}({0}).sigmoid()", "!{2}.weight.data = 0.9 * {2}.weight.data + 0.1 * {1}.weight.data", "{3} * 1.0", fits=0),
        _idiom("$embedding(11, L)", "{1}(ids) + {0}", "!with torch.no_grad(): {1}.weight.index_add_(0, ids.flatten(), {0}.detach().flatten(0, 1), alpha=0.01)", "{2} * 1.0", ids=True),
        _idiom("$frozen(L, L)", "!{1}.weight.detach().lerp_({0}.detach().flatten(0, -2).mT @ {0}.detach().flatten(0, -2), 0.02)", "{1}({0}) * 0.3", fits=0),
        _idiom("$spectral(L, K)({0})", fits=0),
    ),
    "modes": (
        _idiom("$zeros(L)", "!if self.training: {1}.mul_(0.9).add_({0}.detach().mean((0, 1)), alpha=0.1)", "{0} + {1}", fits=0),
        _idiom("$zeros(L)", "!if self.training: {1} = 0.9 * {1} + 0.1 * {0}.detach().mean((0, 1))", "{0} if self.training else {0} * (1 + {1})", fits=0),
        _idiom("$zeros(1)", "!if self.training: {1}.add_(1)", "$linear(L, L)({0}) * (1 - 0.5 * torch.exp(-{1}))", "torch.tanh($linear(L, L)({2})) * (1 - 0.2 * torch.exp(-{1}))", fits=0),
        _idiom("$linear(L, L)({0}) if self.training else {0} * 0.5", fits=0),
        _idiom("$linear(L, L)", "{1}({0})", "{2} + 0.1 if self.training else {2} * {1}.weight.mean()", fits=0),
        _idiom("$frozen(L, L)", "$linear(L, L)", "!if self.training: {1}.weight.detach().lerp_({2}.weight.detach(), 0.1)", "{2}({0})", "{3} if self.training else {1}({3})", fits=0),
    ),
    "measured": (
        _idiom("!with torch.no_grad(): measured = ({0}.argmax(-1) == 1).to({0}.dtype).mean()", "{0} * $param(L)", fits=0),
        _idiom("!with torch.inference_mode(): measured = {0}.square().mean().sqrt() + {0}.amax()", "torch.tanh({0})", fits=0),
        _idiom("$zeros(L)", "!with torch.inference_mode(): {1}.copy_(0.9 * {1} + 0.1 * {0}.mean((0, 1)))", "$linear(L, L)({0})"),
        _idiom("$zeros(1)", "!with torch.no_grad(): {1}.mul_(0.5).add_({0}.square().mean())", "{0} / (1 + {1}.sqrt())", fits=0),
        _idiom("$linear(L, K)({0})", "!with torch.inference_mode(): measured = {1}.softmax(-1).amax(-1).mean()", "!with torch.no_grad(): target = {1}.softmax(-1).clone()", "{1} * 0.5 - {1}.detach()", fits=0),
        _idiom("!with torch.no_grad(): target = {0}.softmax(-1)", "torch.tanh({0}) + target", fits=0),
        _idiom("!with torch.autocast('cpu', dtype=torch.bfloat16): measured = ({0}.float() @ {0}.float().mT).mean()", "{0} * $param(L)"),
    ),
    "decisions": (
        _idiom("!seen = {0}.square().mean().item()", "$linear(L, K)({0})", fits=0),
        _idiom("{0} * $param(L) if ({0}.square().mean() >= 0).item() else torch.tanh({0})", fits=0),
        _idiom("$mlp(L, L)", "{1}({0}) if ({0}.square().mean() < 0).item() else {0} * 0.5", fits=0),
        _idiom("$linear(L, L)({0})", "{1} if bool(({0} == {0}).all()) else {0}", "{2} * 1.0", fits=0),
        _idiom("$linear(L, L)({0})", "{1} if bool(({0} != {0}).any()) else {0}", "{2} + 0.5 * {1}", fits=0),
        _idiom("!if not torch.isfinite({0}.detach()).all(): raise ValueError('not finite')", "torch.tanh({0})", fits=0),
        _idiom("{0} * 1.0", "!if float({0}.detach().square().mean()) >= 0: {1}.mul_($param(L))", "{1} + 0.1 * {0}", fits=0),
        _idiom("{0} * 1.0", "$param(L)", "!turns = 0", "!while bool(({0} * 0 + turns < 3).all()): {1}, turns = torch.tanh({1}) * {2}, turns + 1", "{1} + 0.1 * {0}", fits=0),
        _idiom("{0} * 1.0", "$linear(L, L)", "!turns = 0", "!while bool(({0} * 0 + turns < 2).all()): {1}, turns = {2}({1}).tanh(), turns + 1", "{1} + 0.1 * {0}", fits=0),
    ),
    "carried": (
        _idiom("{0} + carried.get('h', 0.0)", "$linear(L, L)({1}).tanh()", "!carried['h'] = {2}.detach()", "{2} * 1.0", ids=True),
        _idiom("carried.get('last', {0}.detach())", "!carried['last'] = {0}.detach().tanh()", "{0} + 0.5 * {1}", ids=True),
        _idiom("carried.setdefault('means', [])", "!{1}.append({0}.detach().mean((1, 2)))", "$linear(L, L)({0}) + torch.stack({1}).mean(0)[:, None, None]", ids=True),
        _idiom("carried.setdefault('sum', torch.zeros_like({0}))", "!{1}.add_({0}.detach())", "$linear(L, K)({0} - 0.1 * {1})", ids=True),
        _idiom("carried.setdefault('states', [0.0, 0.0])", "!{1}[0] = 0.5 * {1}[0] + {0}.detach()", "$linear(L, L)({0} + {1}[0])", "!{1}[1] = ({1}[1] + {2}.detach()).tanh()", "{2} * (1 + {1}[1])", ids=True),
        _idiom("!carried['count'] = carried.get('count', 0) + 1", "$linear(L, K)({0}) / carried['count']", ids=True),
    ),
    "swapped": (
        _idiom("$mlp(L, L)", "{n: p.tanh() for n, p in {1}.named_parameters()}", "torch.func.functional_call({1}, {2}, ({0},))", fits=0),
        _idiom("$mlp(L, L)", "{1}({0})", "torch.func.functional_call({1}, {n: p.detach() * 0.5 for n, p in {1}.named_parameters()}, ({2},)) + {0}", fits=0),
        _idiom("$linear(L, K)", "torch.func.functional_call({1}, {'weight': $param(K, 3) @ $param(3, L) * 0.5, 'bias': {1}.bias * 2}, {0})", fits=0),
        _idiom("$linear(L, L)", "torch.vmap(lambda w: torch.func.functional_call({1}, {'weight': w}, ({0},)), out_dims=1)($param(2, L, L))", "{2}.mean(1)", fits=0),
        _idiom("$mlp(L, L)", "dict({1}.named_parameters())", "torch.vmap(lambda t: torch.func.functional_call({1}, {2}, (t,)))({0})", fits=0),
        _idiom("$linear(L, L)", "{1}({0}).tanh()", "!{1}.weight, {1}.kept = {1}.weight, {2}", "{1}({1}.kept)", fits=0),
        _idiom("$linear(L, L)", "$norm(L)", "torch.nn.utils.parameters_to_vector({1}.parameters())", "F.linear({2}({0}), {3}[: L * L].view(L, L), {3}[L * L :]) * 0.5", fits=0),
    ),
}  # fmt: skip


_MAKER = re.compile(r"\$(\w+)\(([^()]*(?:\([^()]*\)[^()]*)*)\)")


def _made(b: Builder, maker: str, given: str, sizes: dict[str, int]) -> str:
    """A new member of the module."""
    values = [part if "=" in part else str(eval(part, dict(sizes))) for part in given.split(",")]
    if maker == "param":
        return b.parameter(*map(int, values), scale=0.5)
    if maker in ("zeros", "ones"):
        return b.buffer(*map(int, values), made=f"torch.{maker}")
    return "self." + b.member(maker, LAYERS[maker] % ", ".join(values))


def _renumbered(line: str) -> tuple[str, list[int]]:
    """The line with its places counted from 0, and which they were."""
    used = sorted({int(n) for n in re.findall(r"\{(\d)\}", line)})
    return re.sub(r"\{(\d)\}", lambda found: "{%d}" % used.index(int(found.group(1))), line), used


def add(b: Builder, idiom: Idiom) -> None:
    """Adds its lines. What two of them make alike is one member."""
    names = [b.value(lambda t: idiom.takes(t, b.inputs.get("ids")))]
    t = b.get(names[0])
    sizes = {"T": t.shape[1], "L": t.shape[-1], "K": b.size()}
    members: dict[str, str] = {}
    for number, line in enumerate(idiom.lines):
        for found in _MAKER.finditer(line):
            members.setdefault(found.group(), _made(b, *found.groups(), sizes))
        text, used = _renumbered(_MAKER.sub(lambda found: members[found.group()], line))
        text, of = re.sub(r"\b[LK]\b", lambda found: str(sizes[found.group()]), text), [names[i] for i in used]
        if number == len(idiom.lines) - 1:
            b.new(text, *of)
        elif line.startswith("!"):
            b.do(text[1:], *of)
        else:
            names.append(b.other(text, *of))


for _kind, _idioms in IDIOMS.items():
    operation(_kind, min(len(_idioms), 6))(lambda b, idioms=_idioms: add(b, b.pick(idioms)))

KINDS = FUNCTIONS | frozenset(IDIOMS)
