-- Count what waits in a status. Writes nothing.
-- KEYS[1] stream
-- ARGV    group, status, where, at     at: a place in the facts, '0' first
-- Returns {entries, place}; of those that are archived, the kept history too. A consumer group that
--         has not joined is told what it would see, a page of it at a time: the caller goes on from
--         `place` until that is '0', and adds.
--@include task facts index where plan

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
local root = where ~= '' and cjson.decode(where)
if root and joined then
  return {count_where(pool, told.names, root), '0'}
end
local kept = 0
if status == 'archived' and not root and ARGV[4] == '0' then
  kept = redis.call('ZCARD', key('archive'))
end
if joined then
  return {redis.call('ZCARD', key('ready', pool)) + kept, '0'}
end

local page, members = redis.call('HSCAN', key('facts'), ARGV[4], 'COUNT', 1000), {}
local query = root and resolve(told.names, root)
for i = 1, #page[2], 2 do
  local facts = cmsgpack.unpack(page[2][i + 1])
  for _, leaf in ipairs(query and query.leaves or {}) do
    leaf.scores = {facts.tags and facts.tags[leaf.tag]}
  end
  if facts.status == status and (not query or satisfies(query.root, 1)) then
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
