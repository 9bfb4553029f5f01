"""CSS of the report: numbers, sections and plots, on screens, phones and paper."""

STYLE = """
:root { --a: #0072b2; --b: #d55e00; --card: #f5f6f7 }
@media (prefers-color-scheme: dark) { :root { --card: #222427 } }
body { max-width: 60rem } h1 { margin: 0 0 .3rem } h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem }
h3 { font-size: 1.05rem; margin: 0 0 .2rem } h4 { font-size: .95rem; margin: .9rem 0 0 }
h2, h3, h4 { overflow-wrap: anywhere }
p { margin: .35rem 0 } a { color: inherit; text-decoration-color: var(--dim) } .small { font-size: .85rem }
code { font: .88em/1.4 ui-monospace, "DejaVu Sans Mono", monospace; background: var(--card); border-radius: 4px;
  padding: .1em .3em; overflow-wrap: anywhere }
.key { list-style: none; padding: 0; margin: .5rem 0 } .key li { margin: .15rem 0 }
.a::before, .b::before { content: ""; display: inline-block; width: .7em; height: .7em; border-radius: 2px;
  margin-right: .4em; background: var(--a) } .b::before { background: var(--b) }
.change { border-left: 4px solid var(--a); padding: .1rem 1rem; background: var(--card); border-radius: 0 8px 8px 0 }
.change li { margin: .5rem 0 } .change ul { padding-left: 1.1rem; margin: .4rem 0 }
nav ul { list-style: none; padding: 0; margin: .3rem 0 } nav li { margin: .35rem 0 }
nav a { display: inline-block; margin-right: .9rem; padding: .1rem 0 }
section.one { margin: 1.4rem 0 2.2rem; padding-top: 1rem; border-top: 1px solid var(--line) }
h2 + section.one { margin-top: 0; padding-top: 0; border-top: 0 } code span { white-space: nowrap }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; margin: .8rem 0 }
figure { margin: 0; flex: 1 1 26rem; min-width: 0; max-width: 36rem } figure.wide { flex-basis: 100%; max-width: none }
figure .scroll { border-radius: 6px } figure img { display: block }
figure.wide img { min-width: var(--least); max-width: calc(1.8 * var(--least)) }
figcaption { color: var(--dim); font-size: .85rem; line-height: 1.4; margin-top: .3rem; overflow-wrap: anywhere }
table.numbers th, table.numbers td { white-space: normal; vertical-align: top }
table.numbers :is(th, td):first-child { text-align: left; width: auto; overflow-wrap: anywhere }
table.numbers td.n, table.numbers thead th { white-space: nowrap; width: 1% }
table.numbers tbody th { color: var(--ink); font-weight: 600 }
table.numbers tbody th { padding-top: .7rem } table.reasons td { text-align: left; white-space: normal;
  overflow-wrap: anywhere }
table.reasons th { text-align: left } table.numbers { max-width: 44rem }
@media (max-width: 36rem) {
  h2 { font-size: 1.15rem } figure { flex-basis: 100% }
  table.numbers :is(th, td), table.reasons :is(th, td) { font-size: .84rem;
    padding: .3rem .25rem } nav a { padding: .3rem 0 }
}
@media (min-width: 56rem), print {
  section.one { display: flow-root } section.one > .scroll { clear: both }
  .plots:has(> figure:only-child:not(.wide)) { float: left; width: 56%; margin: .8rem 1.6rem .6rem 0 }
  .plots:has(> figure + figure) > figure:not(.wide) { max-width: calc(50% - .5rem) }
}
@page { size: A4; margin: 13mm 14mm }
@media print {
  :root { color-scheme: light; --ink: #000; --dim: #444; --line: #bbb; --bad: #b3261e; --bg: #fff; --card: #f3f3f3 }
  html { font-size: 9.5pt } body { font-size: 1rem; max-width: none; padding: 0; print-color-adjust: exact;
    -webkit-print-color-adjust: exact } a { text-decoration: none } .scroll { overflow: visible }
  section.one, figure, tr, .change li, .warning, dd { break-inside: avoid }
  section.one .scroll:has(table) { display: none }
  thead { display: table-header-group }
  h2, h3, h4, tbody th { break-after: avoid } p { orphans: 3; widows: 3 } th, td { white-space: normal;
    padding: .12rem .4rem }
  section.one { margin: .6rem 0 1.2rem } figure { flex: 0 1 48%; max-width: 48% } nav { display: none }
  figure.wide { flex-basis: 100%; max-width: 100% } figure img, figure.wide img { width: auto;
    min-width: 0; max-width: 100%; max-height: 90mm }
  .plots:has(> figure:only-child:not(.wide)) { width: 48% } figure:only-child { flex-basis: 100%; max-width: 100% }
}
"""
