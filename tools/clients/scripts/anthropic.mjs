// set-up
import Anthropic from '@anthropic-ai/sdk';

const { BASE_URL, API_KEY, MODEL } = process.env;
const client = new Anthropic({ baseURL: BASE_URL, apiKey: API_KEY, maxRetries: 0 });
// end
import { readFileSync } from 'node:fs';

const cancel = process.argv[2] === 'cancel';
const tool = {
  type: 'custom',
  name: 'read_file',
  description: 'Reads a file.',
  input_schema: { type: 'object', properties: { path: { type: 'string' } }, required: ['path'] },
  parse: (input) => input,
  run: ({ path }) => readFileSync(path, 'utf8'),
};
const messages = [{ role: 'user', content: process.env.PROMPT }];
const runner = client.beta.messages.toolRunner({ model: MODEL, max_tokens: 1000, messages, tools: [tool], stream: true });
let deltas = 0;
try {
  for await (const stream of runner) {
    stream.on('text', (text) => {
      process.stdout.write(text);
      if (cancel && ++deltas === 5) stream.abort();
    });
    await stream.done();
  }
} catch (error) {
  if (!(cancel && error instanceof Anthropic.APIUserAbortError)) throw error;
}
