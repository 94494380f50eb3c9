-- Count the groups that wait in one status, for one consumer group. Writes nothing.
-- KEYS[1] stream
-- ARGV    group, status, where, at
--         where: JSON of a query, or ''; at: '0', then the place that the last call returned
-- Returns {entries, place}. For a consumer group that has not joined, the groups that it would see are
--         counted a page at a time: the caller goes on until `place` is '0', and adds. With the status
--         archived the history counts, too.
--@include task facts tags where plan

local group, status, where = ARGV[1], ARGV[2], ARGV[3]
local pool, rule = pool_of(group, status), rules()
local joined = redis.call('SISMEMBER', key('groups'), group) == 1
if not exists() then
  return {0, '0'}
end
local root = where ~= '' and cjson.decode(where)
if root and joined then
  return {count_where(pool, rule.names, root), '0'}
end
local kept = 0
if status == 'archived' and not root and ARGV[4] == '0' then
  kept = redis.call('ZCARD', key('archive'))
end
if joined then
  return {redis.call('ZCARD', key('ready', pool)) + kept, '0'}
end

local page, members = redis.call('HSCAN', key('facts'), ARGV[4], 'COUNT', PAGE.counted), {}
local query = root and resolve(rule.names, root)
for i = 1, #page[2], 2 do
  local facts = unpack_facts(page[2][i + 1])
  for _, leaf in ipairs(query and query.leaves or {}) do
    leaf.scores = {tag_score(facts.tags and facts.tags[leaf.tag])}
  end
  if facts.status == status and (not query or satisfies(query.root, 1)) then
    members[#members + 1] = page[2][i]
  end
end
local found = #members
for first = 1, #members, PAGE.arguments do
  local last = math.min(first + PAGE.arguments - 1, #members)
  for _, at in ipairs(redis.call('ZMSCORE', key('archive'), unpack(members, first, last))) do
    found = found - (at and 1 or 0)
  end
end
return {found + kept, page[1]}
