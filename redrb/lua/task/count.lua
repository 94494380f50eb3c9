-- Count what waits in a status. Writes nothing.
-- KEYS[1] stream
-- ARGV    group, status, where, at     at: a place in the facts, '0' first
-- Returns {entries, place}; of those that are archived, the kept history too. A consumer group that
--         has not joined is told what it would see, a page of it at a time: the caller goes on from
--         `place` until that is '0', and adds.
--@include task tags index where

local group, status, where = ARGV[1], ARGV[2], ARGV[3]
local pool, told = pool_of(group, status), rules()
local joined = redis.call('SISMEMBER', key('groups'), group) == 1
if not exists() then
  return {0, '0'}
end
if not told.indexed then
  local waiting = joined and number(key('group', group), 'waiting') or redis.call('XLEN', stream)
  return {status == 'completed' and waiting or 0, '0'}
end
local query = where ~= '' and cjson.decode(where)
if query and joined then
  return {count_where(pool, told.names, query), '0'}
end
local kept = status == 'archived' and not query and ARGV[4] == '0' and redis.call('ZCARD', key('archive')) or 0
if joined then
  return {redis.call('ZCARD', key('ready', pool)) + kept, '0'}
end

-- Does a group match, by the scores of its tags among its facts?
local places = {}
for i, name in ipairs(told.names) do
  places[name] = TAGS + i - 1
end
local function matches(node, facts)
  if not node.tag then
    local every = node.all ~= nil
    for _, child in ipairs(node.all or node.any) do
      if matches(child, facts) ~= every then
        return not every
      end
    end
    return every
  end
  local score, listed = tonumber(facts[places[node.tag]]), false
  for _, value in ipairs(score and node.values or {}) do
    if type(value) == 'string' then
      listed = listed or tonumber(term(node.tag, value, false) or '') == score
    else
      listed = listed or score >= value[1] and score <= value[2]
    end
  end
  return listed == not node.inverted
end

local page, members = redis.call('HSCAN', key('facts'), ARGV[4], 'COUNT', 1000), {}
for i = 1, #page[2], 2 do
  local facts = words(page[2][i + 1])
  if facts[STATUS] == status and (not query or matches(query, facts)) then
    members[#members + 1] = page[2][i]
  end
end
local found = #members
for first = 1, #members, 1000 do
  local last = math.min(first + 999, #members)
  for _, at in ipairs(redis.call('ZMSCORE', key('archive'), unpack(members, first, last))) do
    found = found - (at and 1 or 0)
  end
end
return {found + kept, page[1]}
