// Markdown of answers: lexed as a whole, rendered block by block, so that streaming re-renders the last block only.
import DOMPurify from 'dompurify';
import hljs from 'highlight.js/lib/core';
import bash from 'highlight.js/lib/languages/bash';
import cpp from 'highlight.js/lib/languages/cpp';
import css from 'highlight.js/lib/languages/css';
import diff from 'highlight.js/lib/languages/diff';
import go from 'highlight.js/lib/languages/go';
import java from 'highlight.js/lib/languages/java';
import javascript from 'highlight.js/lib/languages/javascript';
import json from 'highlight.js/lib/languages/json';
import python from 'highlight.js/lib/languages/python';
import rust from 'highlight.js/lib/languages/rust';
import sql from 'highlight.js/lib/languages/sql';
import typescript from 'highlight.js/lib/languages/typescript';
import xml from 'highlight.js/lib/languages/xml';
import yaml from 'highlight.js/lib/languages/yaml';
import { Marked, type Token, type Tokens } from 'marked';
import { useLayoutEffect, useMemo, useRef } from 'preact/hooks';
import { CopyButton } from './copy';
import { mathExtension, renderMath } from './math';

const LANGUAGES = { bash, cpp, css, diff, go, java, javascript, json, python, rust, sql, typescript, xml, yaml };
for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);
hljs.registerAliases(['c', 'h', 'cc'], { languageName: 'cpp' });
// Longer blocks stay plain: highlighting them would take longer than a frame.
const MAX_HIGHLIGHTED = 20_000;

const marked = new Marked({ gfm: true, breaks: true });
const ALLOWED_URI = /^(?:https?|mailto):/i;
// Attributes whose values are no addresses: numbers of lists, check boxes of tasks, columns of tables.
const NO_ADDRESSES = ['start', 'type', 'align'];

function escaped(text: string): string {
  return text.replace(/[&<>"]/g, (letter) => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' })[letter]!);
}

marked.use({
  extensions: mathExtension(escaped),
  renderer: {
    // An image of an answer would be a request to another host: it is shown as a link.
    image({ href, text }) {
      return `<a href="${escaped(href)}">${escaped(text || href)}</a>`;
    },
    html({ text }) {
      return escaped(text);
    },
    checkbox({ checked }) {
      return `<input type="checkbox" disabled${checked ? ' checked' : ''} aria-label="${checked ? 'done' : 'open'}"> `;
    },
    table(token) {
      const align = (cell: Tokens.TableCell) => (cell.align ? ` align="${cell.align}"` : '');
      const cells = (row: Tokens.TableCell[], name: string) =>
        row.map((cell) => `<${name}${align(cell)}>${this.parser.parseInline(cell.tokens)}</${name}>`).join('');
      const rows = token.rows.map((row) => `<tr>${cells(row, 'td')}</tr>`).join('');
      return `<div class="table" tabindex="0" role="group" aria-label="Table"><table><thead><tr>${cells(token.header, 'th')}</tr></thead><tbody>${rows}</tbody></table></div>`;
    },
  },
});

DOMPurify.addHook('afterSanitizeAttributes', (node) => {
  if (node.tagName !== 'A') return;
  node.setAttribute('target', '_blank');
  node.setAttribute('rel', 'noopener noreferrer');
});

// Thousands of nested quotes or lists exceed the stack of the parser: such a text is shown without markup.
function blocks(text: string): Token[] {
  try {
    return marked.lexer(text);
  } catch {
    return [{ type: 'plain', raw: text }];
  }
}

function plain(text: string): DocumentFragment {
  const paragraph = document.createElement('p');
  paragraph.className = 'plain';
  paragraph.textContent = text;
  const content = document.createDocumentFragment();
  content.append(paragraph);
  return content;
}

function rendered(token: Token): DocumentFragment {
  if (token.type === 'plain') return plain(token.raw);
  try {
    const content = DOMPurify.sanitize(marked.parser([token]), {
      RETURN_DOM_FRAGMENT: true,
      ALLOWED_URI_REGEXP: ALLOWED_URI,
      ADD_URI_SAFE_ATTR: NO_ADDRESSES,
      ADD_ATTR: ['target'],
      FORBID_TAGS: ['img', 'style', 'form', 'button', 'svg', 'math'],
      FORBID_ATTR: ['style', 'id', 'name'],
    });
    renderMath(content);
    return content;
  } catch {
    return plain(token.raw);
  }
}

function Block({ token }: { token: Token }) {
  const area = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => area.current!.replaceChildren(rendered(token)), [token.raw]);
  return <div class="block" dir="auto" ref={area} />;
}

export function Code({ text, language, label }: { text: string; language: string; label?: string }) {
  const name = hljs.getLanguage(language) ? language : '';
  const content = useMemo(() => {
    const plain = !name || text.length > MAX_HIGHLIGHTED;
    return { __html: plain ? escaped(text) : hljs.highlight(text, { language: name, ignoreIllegals: true }).value };
  }, [text, name]);
  return (
    <figure class="code">
      <figcaption>
        <span>{label ?? (language || 'text')}</span>
        <CopyButton text={text} />
      </figcaption>
      <pre tabIndex={0} aria-label={label ?? `Code, ${language || 'text'}`}>
        <code dangerouslySetInnerHTML={content} />
      </pre>
    </figure>
  );
}

export function Markdown({ text }: { text: string }) {
  const tokens = useMemo(() => blocks(text), [text]);
  return (
    <div class="markdown">
      {tokens.map((token, at) =>
        token.type === 'space' ? null : token.type === 'code' ? (
          <Code
            key={at}
            text={(token as Tokens.Code).text}
            language={((token as Tokens.Code).lang ?? '').split(/\s/)[0]!.toLowerCase()}
          />
        ) : (
          <Block key={at} token={token} />
        ),
      )}
    </div>
  );
}
