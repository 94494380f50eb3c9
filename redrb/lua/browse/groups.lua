-- Read where groups stand, for people who look at them: a page. Writes nothing.
-- KEYS[1] stream
-- ARGV    the call `Browse` of redrb/watch/groups/calls.py
-- Returns its reply, and behind it the facts of each group, '' where there are none
--@include task facts pools pending where put_record

local ask = cmsgpack.unpack(ARGV[1])
local group, source, at = ask.group, ask.source, ask.place
if not exists() then
  return cmsgpack.pack({indexed = true})
end
local rule = rules()
local joined = redis.call('SISMEMBER', key('groups'), group) == 1
local query = ask.where ~= '' and read_query(ask.where)
local pool = key('ready', pool_of(group, source))
local by_facts = not joined and source -- its pools do not exist: the groups that it would find
if source == 'stalest' then
  if not joined or not (indexes_versions() or sorts_by_version()) then
    return cmsgpack.pack({indexed = false})
  end
  pool = versions_of(group)
end
if source == 'newest' or source == 'given' or source == 'leased' then
  by_facts = false
end
local page = PAGE.browsed
if not query and not by_facts then
  page = math.min(math.max(ask.most, PAGE.browsed_least), page)
end

-- Each of these returns members, the next place and the number of groups of the source.
local function newest_members()
  local from = at == '' and number(puts, 'last') or tonumber(at)
  local first, members, total = math.max(from - page + 1, 1), {}, redis.call('XLEN', stream)
  for seq = from, first, -1 do -- bound: PAGE.browsed
    members[#members + 1] = member_of(seq)
  end
  if first == 1 or #members == 0 then
    return members, '', total
  end
  local any = false
  for _, packed in ipairs(redis.call('HMGET', key('facts'), unpack(members))) do
    any = any or packed
  end
  if any then
    return members, string.format('%d', first - 1), total
  end
  local before = redis.call('XREVRANGE', stream, '(' .. id_of(first), '-', 'COUNT', 1)[1]
  return {}, before and string.format('%d', seq_of(before[1])) or '', total
end

local function leased_members()
  if not joined then
    return {}, '', 0
  end
  local members = {}
  local from = at == '' and '-' or at
  for i, entry in ipairs(redis.call('XPENDING', stream, group, from, '+', page)) do
    members[i] = member_of(seq_of(entry[1]))
    from = '(' .. entry[1]
  end
  return members, #members == page and from or '', count_leased(group)
end

local function sorted_members()
  local from, total = tonumber(at) or 0, redis.call('ZCARD', pool)
  local members = redis.call('ZRANGE', pool, from, from + page - 1)
  return members, from + page < total and string.format('%d', from + page) or '', total
end

local function given_members()
  local members = {}
  for i = 1, math.min(#ask.seqs, PAGE.browsed) do
    members[i] = member_of(ask.seqs[i])
  end
  return members, '', #members
end

local function matches(facts)
  if by_facts and facts.status ~= source then
    return false
  end
  return not query or satisfies(query, facts)
end

-- The state of a group, and what belongs to it.
local function state_of(member, facts)
  local seq = tonumber(member)
  local id = id_of(seq)
  if facts then
    if not joined then
      return {state = 'waiting', status = facts.status}
    end
    local status = redis.call('HGET', key('moved', group), member) or facts.status
    if redis.call('ZSCORE', key('ready', pool_of(group, status)), member) then
      return {state = 'waiting', status = status}
    end
    local pending = redis.call('XPENDING', stream, group, id, id, 1)[1]
    if pending then
      return {state = 'leased', slot = pending[2], idle_ms = pending[3]}
    end
  end
  local letters = redis.call('ZCOUNT', key('letters', group), seq, seq)
  return {state = letters > 0 and 'dead' or facts and 'done' or 'gone'}
end

local members, next_place, total
if source == 'given' then
  members, next_place, total = given_members()
elseif source == 'leased' then
  members, next_place, total = leased_members()
elseif source == 'newest' or by_facts then
  members, next_place, total = newest_members()
else
  members, next_place, total = sorted_members()
end
local looked, found, records = 0, {}, {}
local packed = #members > 0 and redis.call('HMGET', key('facts'), unpack(members)) or {}
for i, member in ipairs(members) do
  local whole, facts = pcall(unpack_facts, packed[i])
  facts = packed[i] and whole and facts or nil
  looked = looked + (packed[i] and 1 or 0)
  if source == 'given' or facts and matches(facts) or packed[i] and not whole then
    local state = (whole or not packed[i]) and state_of(member, facts) or {state = 'damaged'}
    state.seq = tonumber(member)
    state.reads = counter(redis.call('HGET', key('reads', group), member) or '0')
    state.failed = counter(redis.call('HGET', key('deliveries', group), member) or '0')
    found[#found + 1], records[#records + 1] = state, packed[i] or ''
  end
end
local reply = {place = next_place, looked = looked, total = total, incarnation = rule.incarnation,
  version = rule.version, groups = found}
return {cmsgpack.pack(reply), unpack(records)}
