-- A plain task becomes an indexed one, once in its life and a page at a time.
--
-- Until the last step the task is plain. A page of entries that a consumer group has never taken gets
-- facts and goes to its ready:<group>, as if the entries had been requeued, and its cursor advances.
-- The last step does the entries that are leased and those put since the last page.
--@include task facts pools pending capacity

local PAGE = 1000
local arriving = 0 -- entries that a put has just added and not counted yet

-- Add waiting groups to versions:<pool> and newest:<pool>, for staleness rules that the task was given
-- later: the next page of the facts. Returns whether there is more.
local function fill_versions()
  local at = redis.call('HGET', task, 'filling')
  if not at then
    return false
  end
  local page, rule, all = redis.call('HSCAN', key('facts'), at, 'COUNT', 500), rules(), groups()
  for i = 1, #page[2], 2 do
    local member, facts = page[2][i], cmsgpack.unpack(page[2][i + 1])
    for _, group in ipairs(all) do
      local pool = home_of(group, member, facts)
      if redis.call('ZSCORE', key('ready', pool), member) then
        if rule.max_staleness and rule.order ~= 'stalest' and facts.version then
          redis.call('ZADD', key('versions', pool), facts.version, member)
        end
        if rule.max_token_staleness and facts.newest then
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

-- Give groups facts. A plain task that holds groups has order fifo, no tags, and knows no versions.
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

-- The next page of stored seqs beyond `after`, and the last seq that the page covers. `whole`: no seq is
-- missing, so no entry is read; entries come with all their bytes.
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

-- Convert the next page of a consumer group. Returns whether there is more.
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

-- Convert the next page of a task that no consumer group has joined. Returns whether there is more.
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

-- Describe entries that a consumer group leases and, with `requeued`, those it has requeued.
local function describe_taken(group, requeued)
  local seqs = {}
  each_leased(group, nil, function(seq)
    seqs[#seqs + 1] = seq
  end)
  for _, member in ipairs(requeued and redis.call('ZRANGE', key('ready', group), 0, -1) or {}) do
    seqs[#seqs + 1] = tonumber(member)
  end
  describe(seqs)
end

-- Convert the next page of every consumer group. Returns whether there is more.
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

-- Whether so little is left to convert that one script may do it.
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

-- Make a plain task an indexed one.
local function index_all(all)
  while convert(all) do end
  for _, requeued in ipairs({false, true}) do -- entries that were leased since the conversion began
    for _, group in ipairs(all) do
      if redis.call('HLEN', key('facts')) < redis.call('XLEN', stream) - arriving then
        describe_taken(group, requeued)
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
