// LaTeX of answers as MathML: \(…\) and $…$ in a line, \[…\] and $$…$$ displayed. Prices and shell variables stay text.
import type { TokenizerAndRendererExtension, Tokens } from 'marked';
import temml from 'temml';

// A longer formula stays text: it would take longer than a frame.
const MAX_LENGTH = 4000;
// Em and pt: a formula cannot cover the page.
const MAX_SIZE: [number, number] = [20, 200];

const DISPLAY = /^(?:\$\$([^$]{1,4000})\$\$|\\\[([^]{1,4000}?)\\\])/;
const PARENTHESES = /^\\\(([^]{1,4000}?)\\\)/;
// $ opens before no space; it closes after no space, and before no letter, digit or $.
const DOLLARS = /^\$(?=[^\s$])((?:\\[^]|[^$\\\n]|\n(?!\s*\n))*)(?<!\s)\$(?![\p{L}\p{N}$])/u;
// An amount within a sentence: "$5 for a" is no formula, "$5 \times 3$" and "$2n$" are.
const AMOUNT = /^\d[\d.,]*[kKMB]?[\s/,;:–-]+\p{L}{2}/u;
const START = /(?<![\p{L}\p{N}$\\])\$(?=\S)|\\[([]/u;

function formula(source: string): Tokens.Generic | undefined {
  const display = DISPLAY.exec(source);
  const found = display ?? PARENTHESES.exec(source) ?? DOLLARS.exec(source);
  const tex = found?.[1] ?? found?.[2];
  if (!found || !tex?.trim() || tex.length > MAX_LENGTH) return undefined;
  if (!display && found[0].startsWith('$') && AMOUNT.test(tex)) return undefined;
  return { type: 'math', raw: found[0], tex, display: !!display };
}

// Before the rules of markdown, which would take backslashes, underscores and asterisks as markup.
export function mathExtension(escaped: (text: string) => string): TokenizerAndRendererExtension[] {
  return [
    {
      name: 'math',
      level: 'inline',
      start: (source) => START.exec(source)?.index,
      tokenizer: formula,
      renderer: (token) =>
        `<span class="math${token['display'] ? ' display' : ''}" title="${escaped(token['tex'] as string)}">${escaped(token.raw)}</span>`,
    },
    {
      // With empty lines, and signs that would begin a list or a heading.
      name: 'mathBlock',
      level: 'block',
      start: (source) => /\n {0,3}(?=\$\$|\\\[)/.exec(source)?.index,
      tokenizer(source) {
        const indent = /^ {0,3}/.exec(source)![0];
        const token = formula(source.slice(indent.length));
        const end = token?.['display'] && /^[ \t]*(?:\n+|$)/.exec(source.slice(indent.length + token.raw.length));
        if (!token || !end) return undefined;
        return { type: 'mathBlock', raw: indent + token.raw + end[0], tokens: [token] };
      },
      renderer(token) {
        return `<p>${this.parser.parseInline(token.tokens!)}</p>`;
      },
    },
  ];
}

interface TreeNode {
  attributes?: { style?: string };
  style?: Record<string, string>;
  children?: TreeNode[];
}

// The content security policy has no style attributes; styles that are set by script are allowed.
function withoutStyleAttributes(node: TreeNode): void {
  const { style: cssText } = node.attributes ?? {};
  if (cssText) {
    delete node.attributes!.style;
    node.style = { cssText, ...node.style };
  }
  node.children?.forEach(withoutStyleAttributes);
}

// Replaces the source of each formula by MathML; a formula that is not LaTeX, or not complete yet, stays as it is.
export function renderMath(content: DocumentFragment): void {
  for (const element of content.querySelectorAll<HTMLElement>('.math')) {
    const displayMode = element.classList.contains('display');
    try {
      const tree = temml.__renderToMathMLTree(element.title, { displayMode, throwOnError: true, maxSize: MAX_SIZE });
      withoutStyleAttributes(tree as TreeNode);
      element.replaceChildren((tree as { toNode(): Node }).toNode());
      element.removeAttribute('title');
    } catch {
      element.className = 'plain';
      element.removeAttribute('title');
    }
  }
}
