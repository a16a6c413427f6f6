"""What generated products are made of: kinds of product, their attributes, options and prices."""

from dataclasses import dataclass

# department: attributes that any of its products may have
ATTRIBUTES = {
    "beauty": "cruelty free, paraben free, sulfate free, fragrance free, alcohol free, dermatologist tested, "
    "long lasting, travel size, natural ingredients, easy apply, non toxic, anti aging",
    "electronics": "fast charging, easy install, plug play, high speed, heavy duty, noise cancelling, "
    "carrying case, batteries included, high resolution, lightweight body, water resistant, "
    "one button control",
    "fashion": "machine wash, hand wash, slim fit, relaxed fit, classic fit, moisture wicking, quick drying, "
    "everyday wear, elastic closure, zipper pocket, soft lining, imported fabric",
    "garden": "easy assemble, space saving, easy clean, eco friendly, heavy duty, rust proof, non slip, "
    "fully assembled, weather resistant, storage space, solid wood, stainless steel",
    "grocery": "gluten free, sugar free, low sodium, dairy free, non gmo, certified organic, soy free, "
    "artificial colors, high protein, ready eat, nut free, low calorie",
}

# department | query | noun of the title | place in the shop | attributes of this kind | options | dollars
_KINDS = """
beauty | face moisturizers for dry skin | Face Moisturizer | Skin Care › Face › Creams | hyaluronic acid, dry skin, oil free | scent, size ml | 8-45
beauty | shampoo for damaged hair | Shampoo | Hair Care › Shampoo & Conditioner | damaged hair, color treated, argan oil | scent, size ml | 6-32
beauty | electric toothbrushes | Toothbrush | Oral Care › Toothbrushes | teeth whitening, sensitive teeth, soft bristles | color, pack | 15-95
beauty | nail polish sets | Nail Polish Set | Foot, Hand & Nail Care › Nail Polish | high gloss, nail art, quick dry | color, pack | 7-30
beauty | makeup brush kits | Makeup Brush Kit | Tools & Accessories › Makeup Brushes | synthetic bristles, travel pouch, rose handle | color, pieces | 9-48
beauty | deodorant sticks | Deodorant Stick | Personal Care › Deodorants | aluminum free, tea tree, sensitive skin | scent, pack | 5-26
beauty | hair clippers for men | Hair Clipper | Hair Care › Cutting Tools | ceramic blade, cordless trimmer, guide combs | color, style | 19-89
beauty | lip balm with spf | Lip Balm | Skin Care › Lip Care | seed oil, sun protection, dry lips | flavor name, pack | 4-19
electronics | bluetooth headphones | Headphones | Headphones › Over Ear Headphones | stereo sound, foldable headband, deep bass | color, style | 22-240
electronics | usb c charging cables | Charging Cable | Accessories › Cables | nylon braided, gold plated, data transfer | color, length | 6-28
electronics | phone cases with stand | Phone Case | Cell Phones & Accessories › Cases | wireless charging, shock absorption, kickstand design | color, model | 8-36
electronics | home security cameras | Security Camera | Camera & Photo › Surveillance | night vision, motion detection, two way audio | color, pieces | 28-320
electronics | tablet screen protectors | Screen Protector | Tablets › Accessories | tempered glass, scratch proof, bubble free | model, pack | 6-24
electronics | portable bluetooth speakers | Speaker | Portable Audio › Speakers | stereo sound, deep bass, hands free | color, style | 18-160
electronics | mechanical keyboards | Keyboard | Computers › Keyboards | hot swappable, aluminum frame, quiet switches | color, switch | 35-190
electronics | tripods for cameras | Tripod | Camera & Photo › Tripods | aluminum alloy, quick release, ball head | color, length | 20-150
electronics | smart watch bands | Watch Band | Wearables › Bands | quick release, sweat proof, magnetic clasp | color, band size | 7-40
fashion | men's dress shirts | Dress Shirt | Men › Clothing › Shirts | long sleeve, button closure, wrinkle free | color, size | 16-70
fashion | women's running shoes | Running Shoes | Women › Shoes › Athletic | rubber sole, arch support, memory foam | color, shoe size | 28-140
fashion | women's summer dresses | Summer Dress | Women › Clothing › Dresses | short sleeve, floral print, knee length | color, size | 18-75
fashion | men's leather belts | Leather Belt | Men › Accessories › Belts | genuine leather, metal buckle, ratchet buckle | color, waist | 12-58
fashion | women's winter coats | Winter Coat | Women › Clothing › Coats | faux fur, hooded design, water resistant | color, size | 45-230
fashion | men's hiking boots | Hiking Boots | Men › Shoes › Outdoor | steel toe, rubber sole, ankle support | color, shoe size | 48-210
fashion | pajama sets for women | Pajama Set | Women › Clothing › Sleepwear | long sleeve, drawstring waist, cotton blend | color, size | 17-60
fashion | men's swim trunks | Swim Trunks | Men › Clothing › Swim | mesh liner, drawstring closure, side split | color, size | 14-46
fashion | baseball caps | Baseball Cap | Men › Accessories › Hats | adjustable strap, sun protection, embroidered logo | color, style | 9-35
garden | table lamps for bedroom | Table Lamp | Lighting › Lamps | living room, glass shade, dimmable bulb | color, style | 22-130
garden | area rugs for living room | Area Rug | Home Décor › Rugs | living room, low pile, stain resistant | color, rug size | 30-290
garden | blackout curtains | Blackout Curtains | Home Décor › Window Treatments | machine washable, thermal insulated, living room | color, panel size | 16-80
garden | coffee tables | Coffee Table | Furniture › Living Room | tempered glass, metal legs, lift top | color, style | 70-420
garden | memory foam pillows | Foam Pillow | Bedding › Pillows | memory foam, neck support, cooling gel | size bed, pack | 18-85
garden | office chairs with lumbar support | Office Chair | Furniture › Office | lumbar support, height adjustable, mesh back | color, style | 80-380
garden | shoe racks | Shoe Rack | Storage › Closet | wall mounted, metal frame, bamboo shelves | color, tiers | 19-95
garden | scented candles | Scented Candle | Home Décor › Candles | soy wax, lead free, glass jar | scent, pack | 8-38
garden | throw blankets | Throw Blanket | Bedding › Blankets | super soft, double sided, machine washable | color, blanket size | 15-66
grocery | protein bars | Protein Bars | Snack Foods › Bars | plant based, whole grain, keto friendly | flavor name, count | 9-42
grocery | green tea bags | Green Tea | Beverages › Tea | caffeine free, individually wrapped, loose leaf | flavor name, count | 5-28
grocery | ground coffee | Ground Coffee | Beverages › Coffee | dark roast, fair trade, single origin | flavor name, weight | 8-36
grocery | dried fruit snacks | Dried Fruit | Snack Foods › Fruit | freeze dried, resealable bag, no preservatives | flavor name, weight | 6-33
grocery | hot sauce | Hot Sauce | Sauces › Hot Sauce | small batch, ghost pepper, gift set | flavor name, pack | 5-30
grocery | popcorn snacks | Popcorn | Snack Foods › Popcorn | hand crafted, whole grain, sea salt | flavor name, count | 6-29
grocery | almond butter | Almond Butter | Pantry › Nut Butters | plant based, stone ground, no stir | flavor name, weight | 7-31
grocery | pasta noodles | Pasta Noodles | Pantry › Pasta | bronze cut, quick cooking, kosher certified | style pasta, count | 4-27
grocery | chocolate truffles | Chocolate Truffles | Candy › Chocolate | individually wrapped, gift set, valentine day | flavor name, weight | 9-46
"""  # noqa: E501

OPTIONS = {
    "color": "black, white, navy blue, red, forest green, silver grey, light pink, burgundy, khaki, "
    "royal purple, mustard yellow, coral, teal, chocolate brown, ivory, charcoal, lavender, "
    "bright orange, beige, mint",
    "size": "x-small, small, medium, large, x-large, xx-large, 3x-large",
    "shoe size": "6, 6.5, 7, 7.5, 8, 8.5, 9, 9.5, 10, 11, 12, 13",
    "scent": "fresh lemon, french vanilla, eucalyptus spa, wild rose, coconut milk, cedar wood, green apple, "
    "unscented, orange blossom, peppermint",
    "flavor name": "dark chocolate, peanut butter, sea salt caramel, wild berry, lemon ginger, "
    "cinnamon spice, original, mango chili, smoky bbq, vanilla bean, maple pecan, sour cherry",
    "style": "modern, rustic, vintage, sport, business, deluxe edition, two tone, minimalist",
    "pack": "pack of 1, pack of 2, pack of 3, pack of 4, pack of 6, pack of 12",
    "count": "6 count, 12 count, 18 count, 24 count, 36 count, 48 count",
    "pieces": "2 piece, 4 piece, 8 piece, 12 piece, 18 piece",
    "weight": "4 ounce, 8 ounce, 12 ounce, 1 pound, 2 pound, 5 pound",
    "size ml": "50 ml, 100 ml, 200 ml, 250 ml, 400 ml, 1000 ml",
    "length": "3 feet, 6 feet, 10 feet, 15 feet, 25 feet",
    "model": "model a10, model a12, model s21, model s22 ultra, model x7, model x8 pro",
    "switch": "linear switch, tactile switch, clicky switch, silent switch",
    "band size": "38mm, 40mm, 42mm, 44mm, 45mm",
    "waist": "30 inch, 32 inch, 34 inch, 36 inch, 38 inch, 42 inch",
    "rug size": "2 x 3 ft, 3 x 5 ft, 5 x 7 ft, 6 x 9 ft, 8 x 10 ft, 9 x 12 ft",
    "panel size": "42w x 63l, 42w x 84l, 52w x 63l, 52w x 84l, 52w x 95l",
    "size bed": "twin, queen, king, standard, body",
    "tiers": "2 tier, 3 tier, 4 tier, 5 tier, 6 tier",
    "blanket size": "30 x 40, 50 x 60, 60 x 80, 90 x 90",
    "style pasta": "penne, spaghetti, rotini, linguine, elbow, farfalle",
}

SYLLABLES = (
    "al bar cor del el fen gar hol ix jun kel lor mar nor ova pel quin ras sol tor ul vex wen yor zan".split()
)
PURPOSES = {
    "beauty": "Women, Men, Daily Use, Travel, Sensitive Skin, Gifts",
    "electronics": "Home, Office, Travel, Gaming, Outdoors, Students",
    "fashion": "Work, Weekends, Vacation, Parties, Sports, Gifts",
    "garden": "Bedroom, Dorm, Apartment, Patio, Entryway, Office",
    "grocery": "Breakfast, Lunch Boxes, Hiking, Parties, Gifts, Pantry",
}


@dataclass(frozen=True)
class ProductKind:
    """One kind of product, as a row of the table above."""

    category: str
    query: str
    noun: str
    place: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    cheapest: float
    dearest: float


def listed(text: str) -> tuple[str, ...]:
    """The items of a comma-separated list."""
    return tuple(item.strip() for item in text.split(", "))


def product_kinds() -> list[ProductKind]:
    """All kinds, in the order of the table."""
    kinds = []
    for row in _KINDS.strip().splitlines():
        category, query, noun, place, attributes, options, dollars = (
            cell.strip() for cell in row.split(" | ")
        )
        low, high = map(float, dollars.split("-"))
        known = (*listed(attributes), *listed(ATTRIBUTES[category]))
        kinds.append(ProductKind(category, query, noun, place, known, listed(options), low, high))
    return kinds
