"""Colours and the style sheet of the HTML page; both work on light and dark backgrounds."""

MEMORY_COLORS = {
    "parameters": "#3b6fb6", "gradients": "#6fa3dc", "optimizer": "#234a80",
    "activations": "#e08a2e", "logits": "#c0483c", "exchange_buffers": "#3a9a6b",
    "working": "#e6bc4f", "margin": "#9aa3ad",
}  # fmt: skip
TIME_COLORS = {
    "matrices": "#3b6fb6", "attention": "#6fa3dc", "elementwise": "#a9c8ea", "logits": "#c0483c",
    "recompute": "#8a6bbd", "tp": "#e08a2e", "ulysses": "#3a9a6b", "ring": "#7cc29d",
    "ep": "#d7689a", "pp": "#e6bc4f", "bubble": "#9aa3ad", "dp": "#8b5e3c", "optimizer": "#234a80",
}  # fmt: skip
STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--fg:#1c2126;--dim:#5d6670;--line:#d9dde1;--card:#fff}
@media(prefers-color-scheme:dark){:root{--bg:#16191c;--fg:#e6e9ec;--dim:#9aa3ad;--line:#343a40;
--card:#1f2428}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:36px 0 10px}
.sub,.note,footer{color:var(--dim)}.note{font-size:13px;margin:6px 0}
footer{margin-top:40px;font-size:13px;border-top:1px solid var(--line);padding-top:12px}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 16px;
flex:1 1 auto;min-width:130px}
.card b{display:block;font-size:20px;white-space:nowrap}.card span{color:var(--dim);font-size:13px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:5px 12px 5px 0;border-bottom:1px solid var(--line);
vertical-align:top}th{color:var(--dim);font-weight:600}
td.r,th.r{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td:nth-child(2){white-space:nowrap}td:nth-child(9){min-width:280px}
details td:nth-child(2){white-space:normal}
details td:first-child{white-space:nowrap}summary{cursor:pointer;color:var(--dim)}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:13px;margin-bottom:10px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
.bar{display:grid;grid-template-columns:230px 1fr 90px;gap:12px;align-items:center;margin:6px 0}
.bar label{font-size:13px;text-align:right;overflow-wrap:anywhere}
.bar em{font-style:normal;font-size:13px;font-variant-numeric:tabular-nums}
.track{position:relative;display:flex;height:24px;background:var(--line);border-radius:4px;
overflow:hidden}.track i{display:block;height:100%}
.track u{position:absolute;top:0;bottom:0;width:2px;background:var(--fg)}
svg{max-width:100%;height:auto}svg text{fill:var(--fg);font:11px system-ui,sans-serif}
svg .dim{fill:var(--dim)}svg .node{fill:var(--card);stroke:var(--line)}
svg .cell text,svg text.in{fill:#14181c}
@media(max-width:640px){.bar{grid-template-columns:1fr}.bar label{text-align:left}}
"""
