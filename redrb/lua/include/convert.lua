-- From a plain task to an indexed one, once in the life of a task, a page at a time.
--
-- Until the last step the task is a plain one: a page of what a consumer group was never given goes
-- to its ready:<group>, as if it had come back, and its cursor goes on; facts are there beforehand.
-- The last step is as large as what is leased, and what was put since the last page.
--@include task index pending room

local PAGE = 1000
local arriving = 0 -- entries that a put has just added, and that are not counted yet

-- Fill versions:<pool> and newest:<pool> with what waits already, for rules that were given later: a
-- page of the facts, from where the last page ended. Returns whether there is more.
local function fill_versions()
  local at = redis.call('HGET', task, 'filling')
  if not at then
    return false
  end
  local page, told, all = redis.call('HSCAN', key('facts'), at, 'COUNT', 500), rules(), groups()
  for i = 1, #page[2], 2 do
    local member, facts = page[2][i], cmsgpack.unpack(page[2][i + 1])
    for _, group in ipairs(all) do
      local pool = home_of(group, member, facts)
      if redis.call('ZSCORE', key('ready', pool), member) then
        if told.max_staleness and told.order ~= 'stalest' and facts.version then
          redis.call('ZADD', key('versions', pool), facts.version, member)
        end
        if told.max_token_staleness and facts.newest then
          redis.call('ZADD', key('newest', pool), facts.newest, member)
        end
      end
    end
  end
  if page[1] == '0' then
    redis.call('HDEL', task, 'filling')
    return false
  end
  redis.call('HSET', task, 'filling', page[1])
  return true
end

-- Give groups facts. A plain task that holds some has order fifo, no tags, and knows no versions.
local function describe(seqs)
  local sized, fields = number(task, 'max_bytes') > 0, {}
  for _, seq in ipairs(seqs) do
    local size = sized and redis.call('HGET', key('sizes'), string.format('%.0f', seq))
    fields[#fields + 1] = member_of(seq)
    fields[#fields + 1] = cmsgpack.pack({
      size = tonumber(size or '0'), samples = 1, status = 'completed', score = seq,
    })
  end
  in_parts('HSET', key('facts'), fields)
end

-- Seqs of what is stored beyond one, a page of them, and the last that this page covers. `whole`: no
-- seq is missing, so none has to be looked at; else entries are read, which come with all their bytes.
local function page_after(after, last, whole)
  local seqs, upto = {}, math.min(after + PAGE, last)
  if whole then
    for seq = after + 1, upto do
      seqs[#seqs + 1] = seq
    end
    return seqs, upto
  end
  local most = PAGE / 4
  for i, entry in ipairs(redis.call('XRANGE', stream, '(' .. id_of(after), id_of(last), 'COUNT', most)) do
    seqs[i] = seq_of(entry[1])
  end
  return seqs, #seqs == most and seqs[most] or last
end

-- Describe the next page for a consumer group, and let it wait in its pool. Returns whether there is more.
local function convert_page(group)
  local state, ready, last = key('group', group), {}, number(task, 'last')
  local cursor = number(state, 'cursor')
  local returned = redis.call('ZCARD', key('ready', group))
  local whole = number(state, 'waiting') == returned + last - cursor
  local seqs, upto = page_after(cursor, last, whole)
  describe(seqs)
  for _, seq in ipairs(seqs) do
    ready[#ready + 1], ready[#ready + 2] = string.format('%.0f', seq), member_of(seq)
  end
  in_parts('ZADD', key('ready', group), ready)
  redis.call('HSET', state, 'cursor', string.format('%.0f', upto))
  return upto < last
end

-- The same where nobody has joined: all that is stored waits for whoever does.
local function describe_page()
  local last, at = number(task, 'last'), number(task, 'described')
  local entry = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local first = entry and seq_of(entry[1]) or last + 1
  local whole = redis.call('XLEN', stream) - arriving == last - first + 1
  local seqs, upto = page_after(math.max(at, first - 1), last, whole)
  describe(seqs)
  redis.call('HSET', task, 'described', string.format('%.0f', upto))
  return upto < last
end

-- Describe what a consumer group leases, and what came back from its leases.
local function describe_taken(group, came_back)
  local seqs = {}
  each_leased(group, nil, function(seq)
    seqs[#seqs + 1] = seq
  end)
  for _, member in ipairs(came_back and redis.call('ZRANGE', key('ready', group), 0, -1) or {}) do
    seqs[#seqs + 1] = tonumber(member)
  end
  describe(seqs)
end

-- Go on a page. Returns whether there is more.
local function convert(all)
  local more = false
  if redis.call('HSETNX', task, 'converting', '1') == 1 then
    for _, group in ipairs(all) do
      describe_taken(group, true)
    end
  end
  for _, group in ipairs(all) do
    more = convert_page(group) or more
  end
  return #all == 0 and describe_page() or more
end

-- Is so little left that one script may do it?
local function is_nearly_indexed(all)
  if rules().indexed or redis.call('XLEN', stream) <= 2 * PAGE then
    return true
  end
  local last, at = number(task, 'last'), #all == 0 and number(task, 'described') or math.huge
  for _, group in ipairs(all) do
    at = math.min(at, number(key('group', group), 'cursor'))
  end
  return last - at <= 2 * PAGE
end

-- Make a plain task an indexed one: what waits has facts and its place in the order.
local function index_all(all)
  while convert(all) do end
  for _, came_back in ipairs({false, true}) do -- leased since it began, and given back since
    for _, group in ipairs(all) do
      if redis.call('HLEN', key('facts')) < redis.call('XLEN', stream) - arriving then
        describe_taken(group, came_back)
      end
    end
  end
  for _, group in ipairs(all) do
    local state = key('group', group)
    local taken = math.max(number(task, 'put') - number(state, 'waiting'), 0)
    redis.call('HSET', state, 'taken', string.format('%.0f', taken))
  end
  redis.call('HDEL', task, 'converting', 'described')
  redis.call('HSET', task, 'indexed', '1')
  known_rules = nil
end
