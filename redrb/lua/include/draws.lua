-- The groups that match a query: the first ones in the pool's order, in a sampled order drawn ones.
--@include facts pools plan where

-- Draw n >= 1 members that match. Returns them in the order in which they were drawn, and, if they have the
-- lowest places, the others with lower places, which get new ones: without these they would be drawn next, as
-- if they had been lucky. A query that few groups match has a draw of its own, which looks at all of these.
-- Which of the two is done depends on no place: else the places that are left would tell of it.
local function draw_where(pool, names, expr, n)
  local query = prepare(pool, names, expr)
  local cost, sources = plan(query, query.root, true)
  local most = 4 * cost > query.size and query.size or 0
  local chosen, passed, looked, step = {}, {}, 0, math.min(n, PAGE.matched)
  while looked < most do -- bound: 4 * cost groups; docs/decisions/0022-bounded-scripts.md says why
    local last = math.min(looked + step, most) - 1
    local page = redis.call('ZRANGE', query.whole.zset, looked, last)
    local matches, at = matching(query, page, true), 1
    for _, member in ipairs(page) do
      if member ~= matches[at] then
        passed[#passed + 1] = member
      else
        chosen[#chosen + 1], at = member, at + 1
        if #chosen == n then
          return chosen, passed
        end
      end
    end
    looked, step = last + 1, math.min(step * 2, PAGE.matched)
  end
  local found = {}
  search(query, true, sources, function(members)
    for i, facts in ipairs(facts_of_all(members)) do
      local weight = facts and facts.score or 0
      local at = weight > 0 and exponential() / weight or math.huge
      found[#found + 1] = {at, exponential(), members[i]} -- equal places have a random order
    end
    if #found > n + 4 * PAGE.matched then
      keep_first(found, n)
    end
  end)
  keep_first(found, n)
  chosen = {}
  for i, each in ipairs(found) do
    chosen[i] = each[3]
  end
  return chosen, {}
end

-- The first n members that match, and those that a draw has passed over.
local function first_where(pool, names, expr, n)
  if rules().sampled then
    return draw_where(pool, names, expr, n)
  end
  return select_where(pool, names, expr, n), {}
end
